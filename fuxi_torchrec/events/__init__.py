"""What an event is, everywhere: histories, features, vocabulary, times, reading and checking logs."""
