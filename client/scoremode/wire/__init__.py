"""The wire: requests, answers and how they are read, and when a request is sent again."""
