{{ config(
    materialized='incremental',
    incremental_strategy='merge',
    unique_key='order_id',
    meta={'owner': 'shop'}
) }}

select * from {{ ref('orders') }}
