{{ config(materialized='table', partition_by=['day'], tblproperties={'delta.enableChangeDataFeed': 'true'}) }}

select * from {{ ref('orders') }}
