"""Model families: one file each, read by import, export and weight sync alike: one truth about names and cuts."""

from hybridflow.models.family import Family, family_of

__all__ = ["Family", "family_of"]
