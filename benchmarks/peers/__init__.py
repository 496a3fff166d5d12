"""Throughput of Weft beside hand-written torch, Accelerate, Lightning Fabric and DeepSpeed."""
