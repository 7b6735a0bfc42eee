"""Model families: one file each, read by import, export and weight sync alike: one truth about names and cuts."""

from hybridflow.models.family import FAMILIES, Family, family_of, use_family

__all__ = ["FAMILIES", "Family", "family_of", "use_family"]
