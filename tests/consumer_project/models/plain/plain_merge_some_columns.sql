{{ config(
    materialized='incremental',
    incremental_strategy='merge',
    unique_key=['order_id', 'day'],
    merge_update_columns=['status'],
    incremental_predicates=["DBT_INTERNAL_DEST.day >= date '2026-01-01'"],
    on_schema_change='append_new_columns'
) }}

select * from {{ ref('orders') }}
