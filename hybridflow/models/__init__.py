"""Model families, one file each. Import, export and weight sync all use the family's mapping of
tensor names and shards."""

from hybridflow.models.family import FAMILIES, Family, family_of, use_family

__all__ = ["FAMILIES", "Family", "family_of", "use_family"]
