"""One model, one block pool, one step loop."""
