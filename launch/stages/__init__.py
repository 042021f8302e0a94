"""Define the stages of a recipe: each turns folders into one folder, and is thin."""
