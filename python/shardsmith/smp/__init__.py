"""The interface of training scripts: `import smdistributed.modelparallel.torch as smp`, or this package itself.

Importing it imports torch, but not transformers (which imports this while it is half imported itself).
"""
from __future__ import annotations

from typing import Any

from shardsmith.errors import Error
from shardsmith.smp import amp, model, nn, optimizers, patches, sharded_data_parallel_checkpoint, trainer, utils
from shardsmith.smp.activation_checkpointing import set_activation_checkpointing
from shardsmith.smp.background import wait_for_checkpoint
from shardsmith.smp.creation import delay_param_initialization, model_creation, set_tensor_parallelism, tensor_parallelism
from shardsmith.smp.model import DistributedModel
from shardsmith.smp.optimizer import DistributedOptimizer
from shardsmith.smp.placing import partition, set_partition
from shardsmith.smp.ranks import *  # noqa: F403
from shardsmith.smp.ranks import __dict__ as _ranks
from shardsmith.smp.registering import tp_register, tp_register_with_module
from shardsmith.smp.resuming import resume_from_checkpoint
from shardsmith.smp.saving import save_checkpoint
from shardsmith.smp.session import CommGroup, RankType, init, is_initialized, is_tracing, num_microbatches, state
from shardsmith.smp.state_files import load, save
from shardsmith.smp.stepping import StepOutput, step

__all__ = [
    "amp", "hvd_average_grads", "patches", "sharded_data_parallel_checkpoint", "utils",
    "CommGroup", "DistributedModel", "DistributedOptimizer", "Error", "RankType", "StepOutput",
    "delay_param_initialization", "init", "is_initialized", "is_tracing", "load", "model", "model_creation", "nn", "num_microbatches",
    "optimizers",
    "partition", "resume_from_checkpoint", "save", "save_checkpoint", "set_activation_checkpointing", "set_partition", "set_tensor_parallelism", "state", "step",
    "tensor_parallelism", "tp_register", "tp_register_with_module", "wait_for_checkpoint",
]
__all__ += sorted(name for name, value in _ranks.items()
                  if not name.startswith("_") and (getattr(value, "__module__", "") == "shardsmith.smp.ranks"
                                                   or isinstance(value, (CommGroup, RankType))))

if trainer.is_asked_for():
    trainer.install()

def hvd_average_grads(*args: Any, **kwargs: Any) -> Any:
    """Refused: gradients are averaged at the end of a step with 'ddp', horovod is not supported."""
    raise Error("unsupported", "smp.hvd_average_grads: horovod is not supported; with 'ddp': True in smp.init gradients are averaged at the "
                               "end of each step")
