"""Trains and fine-tunes transformers split over many processes; saves, resumes and checks their checkpoints.

Importing this imports no torch: the training half (`shardsmith.smp`) does, when it is imported itself.
"""
from shardsmith.errors import Error

__version__ = "0.1.0"
__all__ = ["Error", "__version__"]
