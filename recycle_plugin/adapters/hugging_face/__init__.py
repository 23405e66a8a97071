"""The adapter for Hugging Face's Accelerate and Trainer, over DeepSpeed's sharded replicas."""
