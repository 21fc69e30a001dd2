"""FuXi-Linear: three channels, a multi-stage feed-forward network, three equivalent forms."""
