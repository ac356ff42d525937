"""How the helpers of 1.6 to 1.8 number an optimizer's parameters: as torch's state_dict does, over the groups of this rank."""
from __future__ import annotations

from typing import Any

import torch


class OptimizerNames:
    """Base of DistributedOptimizer."""

    optimizer: torch.optim.Optimizer
    _names: Any

    def _numbered(self) -> dict[int, torch.Tensor]:
        return dict(enumerate(p for group in self.optimizer.param_groups for p in group["params"]))

    @property
    def redefined_params(self) -> bool:
        """Whether the groups hold other tensors than the script gave: masters, or shards."""
        from shardsmith.smp.session import state

        return state.model is not None and state.model.optimized is not state.model._local

    def orig_state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's own, of this rank."""
        return self.optimizer.state_dict()

    def param_name_to_index(self) -> dict[str, int]:
        """By the user's names, of this rank's parameters."""
        names = self._names()
        return {names[id(p)]: index for index, p in self._numbered().items() if id(p) in names}

    def _param_id_to_index(self) -> dict[int, int]:
        return {id(p): index for index, p in self._numbered().items()}

    def _param_index_to_param_local(self) -> dict[int, torch.Tensor]:
        return self._numbered()
