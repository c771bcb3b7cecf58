# The bucket of MLflow's artifacts, and a user who reaches it alone: MLflow never has the store's root key.
set -eu
until mc alias set s3 http://s3:9000 "$MINIO_ROOT_USER" "$MINIO_ROOT_PASSWORD"; do sleep 1; done
mc mb --ignore-existing s3/mlflow
mc admin user add s3 mlflow "$S3_PASSWORD"
mc admin policy create s3 mlflow-bucket /bucket-policy.json
mc admin policy attach s3 mlflow-bucket --user mlflow || mc admin policy entities s3 --user mlflow | grep -q mlflow-bucket
