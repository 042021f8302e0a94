"""Define what an example is: a folder for each task."""
