"""nn.Modules: channels, block, encoder, state. Imports torch and ops only."""
