"""Hold one stage of a corpus in each module; data_prep/pipeline/plan.py lists them."""
