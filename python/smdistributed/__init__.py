"""The import path that scripts for the SageMaker model parallelism library use; Shardsmith answers under it."""
