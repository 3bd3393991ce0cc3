{{ config(materialized='view') }}

-- One shape for both sources: the feed's files, or what Debezium captured of the table users.
{% if env_var('LAKEHOUSE_SOURCE', 'files') == 'kafka' %}
    select
        id,
        try_element_at(map('c', 'I', 'r', 'I', 'u', 'U', 'd', 'D', 't', 'D'), op) as op,
        lsn as sequence,
        changed_at,
        login,
        email,
        registered_at,
        first_connection_at,
        last_connection_at,
        plan,
        is_deleted or coalesce(is_deactivated, false) as is_deleted,
        ingested_at
    from {{ ref('silver_users_captured') }}
{% else %}
    with valid as (
        {{ lakehouse_patterns.dead_letter_valid_rows(ref('silver_user_changes_flagged')) }}
    )

    select
        id,
        op,
        sequence,
        changed_at,
        json_object.login,
        json_object.email,
        {{ lakehouse_patterns._full_timestamp('json_object.registered_datetime') }} as registered_at,
        {{ lakehouse_patterns._full_timestamp('json_object.first_connection_datetime') }} as first_connection_at,
        {{ lakehouse_patterns._full_timestamp('json_object.last_connection_datetime') }} as last_connection_at,
        json_object.plan,
        op = 'D' or coalesce(try_cast(json_object.is_deleted as boolean), false) as is_deleted,
        ingested_at
    from valid
{% endif %}
