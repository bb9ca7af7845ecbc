"""Fine-tune Phi-MoE on GSM8k with any combination of nanopar's strategies."""
