"""The user's batches: how they are put together, read, shared out over the data ranks, and handed to a loss.

`batch_shape` takes a batch apart into tensors with a row for each sample.  `stream` and `keyed_reads` read samples so
that they look the same on any number of ranks; `batch_shares` and `sharded_loader` give a rank its rows; `passes` knows
where a run is in its data.  `generators` keeps and saves random generators; `loop_draws` looks after numbers that a
loop draws itself.  `losses` calls the user's loss, `outputs` puts the ranks' outputs together.
"""
