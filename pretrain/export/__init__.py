"""Write a trained student as a folder that transformers loads, with a model card."""
