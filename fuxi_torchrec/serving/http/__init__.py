"""A Recommender over HTTP. Needs the extra [serve]."""
