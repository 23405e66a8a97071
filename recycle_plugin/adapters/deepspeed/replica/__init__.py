"""Jobs without a pipeline, whose replicas DeepSpeed shards: the stock engine, with gradient shards exchanged."""
