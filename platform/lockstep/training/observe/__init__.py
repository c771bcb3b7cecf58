"""What a run observes of itself while it trains, which changes none of its bits."""
