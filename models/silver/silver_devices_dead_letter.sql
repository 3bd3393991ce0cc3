{{ config(
    materialized='incremental',
    incremental_strategy='append',
    post_hook='{{ lakehouse_patterns.incremental_watermark() }}'
) }}

{{ refused_lines(ref('silver_devices_flagged')) }}
