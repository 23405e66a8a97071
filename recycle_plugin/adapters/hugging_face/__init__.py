"""The adapter for Hugging Face's Accelerate and Trainer, over sharded replicas of DeepSpeed's."""
