{% snapshot snapshot_users %}

    {{ config(
        unique_key='id',
        strategy='lakehouse_patterns.timestamp',
        updated_at='updated_at',
        check_cols=['login', 'email', 'registered_at', 'first_connection_at', 'last_connection_at', 'plan'],
        hard_deletes='invalidate'
    ) }}

    -- The content is compared, too: an extract without `updated_at` has a new time each day.
    select * from {{ ref('silver_users_extract') }}

{% endsnapshot %}
