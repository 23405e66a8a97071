"""Jobs without a pipeline, whose replicas DeepSpeed shards inside: the stock engine, and exchanged gradient shards."""
