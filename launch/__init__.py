"""What a run needs around the training itself: text, prices, estimates, places to run."""
