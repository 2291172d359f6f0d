"""Conversions as an Airflow DAG (Airflow 3, Cloud Composer 3)."""
