"""Local SGD and DiLoCo: replicas step by themselves, and average what they learnt at the end of each round."""
