"""Disks that fail, as a store sees them."""

import contextlib
import sqlite3


@contextlib.contextmanager
def failing_commits(recommender, code):
    """Every commit of a Recommender's store fails with an error of SQLite's; see its list of result codes."""
    store, database = recommender._appender.store, recommender._appender.store._database

    class Failing:
        def __getattr__(self, name):
            return getattr(database, name)

        def execute(self, sql, *values):
            if sql != "COMMIT":
                return database.execute(sql, *values)
            error = sqlite3.OperationalError(f"told to fail with {code}")
            error.sqlite_errorname = code
            raise error

    store._database = Failing()
    try:
        yield
    finally:
        store._database = database
