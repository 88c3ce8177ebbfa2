"""Parts of examples/train_moe_lm.py: the text, the model, the step, the reports."""
