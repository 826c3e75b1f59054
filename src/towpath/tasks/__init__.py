"""Functions as jobs: tasks, their options, arguments as JSON, handles, the running job and one attempt at
it."""
