"""Journeys of users, from an empty folder, by public commands alone."""
