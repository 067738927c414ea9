"""Executes a plan with torch: stages cut from Hugging Face models, packed microbatches, point-to-point messages."""
