"""Make the MLflow user of the runs, as the administrator; one that is there gets the password again."""

import os

from mlflow.exceptions import MlflowException
from mlflow.server import get_app_client

client = get_app_client("basic-auth", tracking_uri=os.environ["MLFLOW_TRACKING_URI"])
name, password = "lockstep", os.environ["USER_PASSWORD"]
try:
    client.create_user(name, password)
except MlflowException as error:
    if error.error_code != "RESOURCE_ALREADY_EXISTS":
        raise
    client.update_user_password(name, password)
