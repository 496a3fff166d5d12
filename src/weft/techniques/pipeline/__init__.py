"""Pipeline parallelism: ranks that hold consecutive stages of the model, and the order in which microbatches pass."""
