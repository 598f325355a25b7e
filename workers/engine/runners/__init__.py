"""Ways to compute a step's logits: `forward` is what each of them does, one file for each way."""
