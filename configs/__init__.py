"""Shipped configs, one complete YAML a run; `distil` reads them as `shipped:NAME.yaml`."""
