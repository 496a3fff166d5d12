"""The user's batches: how they are put together, read, shared out over the data ranks, and handed to a loss.

`batch_shape` takes a batch apart into tensors with a row for each sample.  `stream` and `keyed_reads` read samples so
that they look the same on any number of ranks; `batch_shares` and `sharded_loader` give a rank its rows.  `loop_draws`
and `placed_draws` look after random numbers that a loop draws itself.  `losses` calls the user's loss.
"""
