{% snapshot snapshot_users %}

    {{ config(
        unique_key='id',
        strategy='lakehouse_patterns.timestamp',
        updated_at='updated_at',
        hard_deletes='invalidate'
    ) }}

    select * from {{ ref('silver_users_extract') }}

{% endsnapshot %}
