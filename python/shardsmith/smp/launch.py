"""Who this process is, by what its launcher put into the environment: torchrun's variables, or mpiexec's.

Of mpiexec's the process group is made without setting torchrun's: transformers' Trainer takes LOCAL_RANK for a sign that the
distribution is its own.
"""
from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from shardsmith.errors import Error

# (rank, size, local rank, local size) as Open MPI, MPICH and Intel MPI, and Slurm's srun name them.
_FAMILIES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
)
# What all processes of one mpiexec have alike, and no other's.
_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid", "SLURM_JOB_ID")


class Place(NamedTuple):
    rank: int
    size: int
    local_rank: int
    local_size: int
    is_torchrun: bool  # torch finds its way by itself


def place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """None: started alone."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank, size = number(environment, "RANK"), number(environment, "WORLD_SIZE")
        return Place(rank, size, number(environment, "LOCAL_RANK", rank), number(environment, "LOCAL_WORLD_SIZE", size), True)
    for rank_name, size_name, local_rank_name, local_size_name in _FAMILIES:
        if rank_name in environment and size_name in environment:
            rank, size = number(environment, rank_name), number(environment, size_name)
            local_size = number(environment, local_size_name, size)
            return Place(rank, size, number(environment, local_rank_name, rank % local_size), local_size, False)
    return None


def number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise Error("invalid_argument", f"the environment's {name} must be a whole number, not {text!r}") from None


def init_method(place: Place, port: int | None = None, environment: Mapping[str, str] = os.environ) -> str:
    """Where mpiexec's processes meet. `port`: of rank 0's host, where MASTER_PORT is not to decide."""
    address = environment.get("MASTER_ADDR", "")
    if not address and place.local_size < place.size:
        raise Error("invalid_argument", f"{place.size} ranks on several hosts: MASTER_ADDR must name rank 0's host (Open MPI: "
                                        "mpiexec -x MASTER_ADDR=host ...), MASTER_PORT a free port of it")
    if port is None:
        port = number(environment, "MASTER_PORT", _port_of_job(environment))
    return f"tcp://{address or '127.0.0.1'}:{port}"


def _port_of_job(environment: Mapping[str, str]) -> int:
    """The same in all processes of a job, and another one in the next: below the ports that the system gives to clients."""
    job = next((environment[name] for name in _JOBS if environment.get(name)), str(os.getppid()))
    return 15000 + zlib.crc32(job.encode()) % 15000
