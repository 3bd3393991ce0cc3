{% test one_row_per(model, columns) %}
    {#- The grain that a description states: fails with each combination of these columns that several rows have. -#}
    select
        {{ columns | join(',\n        ') }},
        count(*) as row_count
    from {{ model }}
    group by {{ columns | join(', ') }}
    having count(*) > 1
{% endtest %}
