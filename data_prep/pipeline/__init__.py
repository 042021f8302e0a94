"""Make a corpus: the plan, the stages, their units of work, and the engines that run them."""
