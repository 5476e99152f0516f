"""What a derivative keeps of its forward computation, chosen under a budget of bytes."""
