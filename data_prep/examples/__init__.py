"""Turn the labelled data of a task into shards: one example a row, its labels in a side file."""
