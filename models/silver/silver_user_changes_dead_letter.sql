{{ config(
    materialized='incremental',
    incremental_strategy='append',
    post_hook='{{ lakehouse_patterns.incremental_watermark() }}',
    enabled=(env_var('LAKEHOUSE_SOURCE', 'files') == 'files')
) }}

{{ refused_lines(ref('silver_user_changes_flagged')) }}
