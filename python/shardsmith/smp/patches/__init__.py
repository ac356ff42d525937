"""`smp.patches`: replacements for functions of torch."""
from shardsmith.smp.patches import checkpoint

__all__ = ["checkpoint"]
