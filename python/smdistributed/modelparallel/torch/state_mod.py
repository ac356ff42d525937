from shardsmith.smp.session import state

__all__ = ["state"]
