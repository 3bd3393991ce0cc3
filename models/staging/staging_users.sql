{{ config(
    materialized='table',
    tblproperties={
        'delta.dataSkippingNumIndexedCols': '0',
        'delta.deletedFileRetentionDuration': 'interval 0 hours'
    },
    post_hook="{{ lakehouse_patterns.transformation_replicator_purge() }}"
) }}

select
    {{ lakehouse_patterns.transformation_replicator(ref('silver_users')) }}
from {{ ref('silver_users') }}
