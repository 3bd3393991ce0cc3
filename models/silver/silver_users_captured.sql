{{ config(
    materialized='incremental',
    incremental_strategy='append',
    enabled=(env_var('LAKEHOUSE_SOURCE', 'files') == 'kafka')
) }}

{{ lakehouse_patterns.change_data_capture_changes(ref('silver_users_records_flagged'), key='id') }}
