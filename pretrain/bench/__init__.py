"""What `distil bench` needs: the baseline step, measurement, comparison."""
